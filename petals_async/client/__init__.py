"""The client: sessions over routes that heal, and decoding on top of them."""
