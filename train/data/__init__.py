"""The data pipeline: pack a data set, index it, order it by (seed, epoch), decode and crop it into batches."""
