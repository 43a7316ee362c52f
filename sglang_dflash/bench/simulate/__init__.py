"""What a server would have done with other block widths: recorded steps replayed under any width policy."""
