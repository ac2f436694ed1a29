"""Operations of an Android device: the device that all sides use, and how each side is measured."""
