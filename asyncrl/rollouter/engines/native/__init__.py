"""The native engine: KV slots, continuous batching, exact behaviour logprobs, on CPU and CUDA."""
