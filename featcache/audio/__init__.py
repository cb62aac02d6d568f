"""From audio files to waveforms: decoding, mixing to mono, resampling, speed, noise."""
