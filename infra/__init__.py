"""AWS through boto3. No other package imports boto3, and this package knows nothing of jobs or training."""
