"""The Megatron backend: models of megatron-core, with weights from and to Hugging Face through Megatron-Bridge."""
