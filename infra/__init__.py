"""AWS through boto3, and nothing else imports boto3: regions, machines, prices. Knows nothing of jobs and training."""
