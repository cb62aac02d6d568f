"""Reading features: opened versions, datasets over them, and their batches. Tensors need
torch; arrays, numpy alone."""
