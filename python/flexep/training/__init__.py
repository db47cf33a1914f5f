"""Train the reference language model: text, batches, gradients over ranks, the loop, starting the ranks."""
