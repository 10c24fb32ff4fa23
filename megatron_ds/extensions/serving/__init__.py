"""HTTP endpoints over a model: OpenAI's completions and chat, and Megatron's PUT /api."""
