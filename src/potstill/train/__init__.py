"""The trainer: recipes, batches and the Hugging Face Trainer subclass."""
