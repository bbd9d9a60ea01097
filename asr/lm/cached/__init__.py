"""Cached recurrent language models: history trie, caches, batching, memory bound."""
