"""The end of a decoding step on a device: record the token, test for the end, prepare the next step."""
