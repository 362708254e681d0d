"""Images: decoding, arrays, folders, augmentation, digits."""
