"""Multi-latent attention: keys and values of a token are projections of one short vector.

DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.

feature                         the declaration, with the flags
latent_rules                    what the flags set in others, and contradictions
latent_sizes                    widths of heads and latents, and the scale of the scores: pure functions of options
latent_mixer                    the mixer of blocks: their module, FLOPs and rotary positions (`models/mixers.py`)
latent_attention                the module
"""
