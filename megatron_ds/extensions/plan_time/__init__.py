"""Seconds of a planned step, and the layouts that would be the fastest.

    device.py         a device: its data sheet, and the constants that were fitted
    cluster.py        devices, the links among them, and what they cost
    recorded_work.py  what a stage computes and sends, as its own code does it in a plan
    work_time.py      recorded work → seconds
    link_time.py      a message over a group → seconds
    stage_time.py     the events of a phase → seconds, with what messages overlap with
    step_time.py      stages and the schedule → seconds of a step, by what they are spent on
    time_text.py      what --plan-time prints
    layouts.py        the layouts of a number of ranks
    layer_record.py   work and memory of one layer of each sort
    estimate.py       seconds and bytes of a layout, added up from records of layers
    search.py         the fastest layouts; search_layouts.py is its command, picture.py its picture

No model, layer or operation is named here: what a stage computes is what its code did when the plan ran it.
"""
