"""Pipeline parallelism: schedules as data, passes that complete them, a simulator that checks them, an
executor.

    schedule = SCHEDULES["1f1b"](pipeline_size, num_microbatches)          schedules/
    program = lower(schedule, num_stages, tied=(0, num_stages - 1))[rank]  passes.py
    Executor(program, stages, channels, …).run(microbatches, scale)        executor.py, stage.py, backward.py
"""
