"""Decoding graphs: H, L, G, their composition and the artefact that both first passes load."""
