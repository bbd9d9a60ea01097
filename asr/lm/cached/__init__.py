"""A recurrent language model behind the history trie: caches, batching, placement."""
