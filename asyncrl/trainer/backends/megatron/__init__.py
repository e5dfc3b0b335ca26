"""The Megatron backend: models of megatron-core, converted from and to Hugging Face by a bridge."""
