"""Start-up: graphs and costs of every width, the pools' table, and transfers between two servers."""
