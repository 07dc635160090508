"""From files to batches: draw or resize a set, index it once, order it by (seed, epoch), decode and crop."""
