"""From files to waveforms: decoding, resampling, speed, noise."""
