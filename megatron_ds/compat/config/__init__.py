"""Configuration in other dialects: DeepSpeed's JSON, GPT-NeoX's YAML, flags of forks, and options without
a counterpart here."""
