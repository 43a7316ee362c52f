"""What a published drafter is: its configuration, files and tensors."""
