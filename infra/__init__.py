"""AWS through boto3, and nothing else imports boto3. Empty until the first machine is rented."""
