"""Client, errors, tags, journal and S3; below: what EC2 offers (market), the stack of a region, a job's instances."""
