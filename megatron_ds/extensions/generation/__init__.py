"""Text from a model under any layout.

requests                            what is asked for, and what comes back
generator                           requests that join and leave between steps
seating, token_batches, cached_keys requests under way, the micro-batches of a step, their keys and values
choice                              the next token from logits
text                                from tokens to text, up to a stop string
"""
