"""`megatron-ds launch`: start the ranks of a training on one machine or many, and end them together.

hostfile     text → hosts and their slots; which of them are used
job          one value with all that a node needs to start its ranks
variables    the environment variables that go along
no_effect    what of a command line is ignored, a sentence each
runners      how the node agents are started: locally, by ssh, pdsh, srun or mpirun
signals      what is forwarded, and how a signal reaches the agent of another host
agent        runs on each node: starts its ranks, forwards signals, ends all when one fails
rank_process a rank of the agent: its process, output, log and places; recorded_error is what it wrote of its failure
child        a process that an agent or the launcher has started
signal_requests  the signals that they received
watch        what an agent reads of the places of its ranks, and how long each has not moved
rank_places  a rank's place as agents report it; which rank is behind the others
stalls       the reports of all hosts, and whether they mean that the job hangs
supervise    runs the processes of a runner, and ends all when one fails or hangs
restarts     whether, when and where a job is started again
layout_check whether a training is right for another number of ranks
notes        what the launcher prints, in lines that fit the terminal
output       the output of a process, in pieces
failures     what the launcher prints last
env_report   what this machine offers; cluster_check and cluster_findings measure its ranks
flag_values  texts of flags → numbers, cores and words
command      the command line; DeepSpeed's flags with their meaning
"""
