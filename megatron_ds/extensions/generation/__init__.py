"""Text from a model under any layout.

requests                            what is asked for, and what comes back
generator                           requests that join and leave between steps
seating, token_batches              requests under way, and the micro-batches of a step
cached_keys, cached_states          their keys and values, and states
choice                              the next token from logits
text                                from tokens to text, up to a stop string
"""
