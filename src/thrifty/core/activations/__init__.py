"""What is kept between the forward and the backward pass: what it costs, and who holds or makes it again."""
