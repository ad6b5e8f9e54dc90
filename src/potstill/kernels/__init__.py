"""Optional fused bodies of the passes over the vocabulary: plain tensors in and out, nothing of potstill imported."""
