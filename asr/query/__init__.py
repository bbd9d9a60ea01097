"""The query engine: history trie, hidden store, caches, placement."""
