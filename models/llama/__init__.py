"""The `llama` family: LLaMA 1/2/3, Mistral, SmolLM, Qwen2."""
