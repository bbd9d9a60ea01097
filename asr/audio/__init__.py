"""Audio files, resampling and filterbanks: the input of recognition."""
