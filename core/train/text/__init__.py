"""Language models in training: tokenizers, rows of tokens, and what a trained model needs besides its weights."""
