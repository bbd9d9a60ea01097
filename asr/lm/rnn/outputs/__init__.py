"""Output layers of recurrent language models and their training objectives."""
