"""The only importer of the compiled module: tensors come in, pointers, sizes and strides go out."""
