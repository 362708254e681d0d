"""Image data: decoding, arrays, folders, augmentation and digits."""
