"""What every model shares on the device. Knows no sockets and no model's name."""
