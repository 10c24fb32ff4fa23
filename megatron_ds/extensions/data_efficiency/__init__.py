"""DeepSpeed's data efficiency: short sequences or easy samples first, and blocks that see some of the tokens.

options, rules                           flags, contradictions
difficulty                               integers that grow during training
seqlen_curriculum                        batches of shorter sequences
difficulty_metrics, difficulty_analysis  the difficulty of each sample of a corpus
sample_order, curriculum_order           the order in which samples are read
random_ltd                               the layer around a block that drops tokens
"""
