"""Decoding graphs: H, L and G, their composition, and the graph that decoders load."""
