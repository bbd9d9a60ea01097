"""One module for each corpus layout."""
