"""What carries calls out: one file or folder for each engine; ``../engine.py`` says what one is."""
