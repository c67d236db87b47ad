"""Corpora, tokenizers, the token cache and the order of samples: numpy and tokenizers, no torch, no ray."""
