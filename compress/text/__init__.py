"""Text to calibrate, train and measure on."""
