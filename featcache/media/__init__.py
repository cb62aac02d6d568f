"""An utterance as a picture, in a file, a page or a terminal, and as sound."""
