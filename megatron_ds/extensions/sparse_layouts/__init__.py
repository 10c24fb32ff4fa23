"""DeepSpeed's sparse attention: layouts of blocks of keys that blocks of queries see.

sparse_options, sparse_rules    flags and contradictions
sparse_layouts                  the layouts of all modes, pure functions
layer_layouts                   the layout of a layer, for models and plans (`models/attention_layouts.py`)
"""
