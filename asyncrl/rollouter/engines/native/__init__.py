"""The embedded engine: slots of KV cache, continuous batching, exact behaviour logprobs, CPU and CUDA."""
