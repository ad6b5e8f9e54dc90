"""The embedded recipe: a word-problem task, its tokenizer and a packaged teacher."""
