"""Models of other packages, divided over tensor-parallel ranks: for `init_inference`, and for training by an engine
with "tensor_parallel.autotp_size".

split_plan.py       which linear layers of a model are divided, and how
adapted_layers.py   the plan of a model with adapters of peft
layer_specs.py      the plan of a JSON, "tensor_parallel.partition_config"
split_layers.py     the division of a layer
summed_linear.py    a linear layer whose products are summed over ranks
split_proof.py      the comparison of the divided model with the whole one
gradient_proof.py   the same for gradients: which of them are partial sums
equal_weights.py    the same whole weights on all ranks, before they are divided
"""
