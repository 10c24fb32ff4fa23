"""1-bit Adam, 0/1 Adam and 1-bit LAMB: optimizers whose data-parallel ranks exchange one bit for each element.

options, facts, rules          flags, names and numbers, contradictions
phases                         what is exchanged in each step
update_rule                    what `ZeroSettings` and the planner ask (`zero.update_rule`)
adam, lamb, zero_one_adam      the updates, each a `CompressedOptimizer`
compressed_update                             the exchanges of a step (`zero.update_hook`)
compressed_mean, signs, units                 one compressed mean over ranks
compressed_set                                state of a set of parameters, its pieces of checkpoints
switched_exchange                             gradients: summed in some steps, left alone in others
"""
