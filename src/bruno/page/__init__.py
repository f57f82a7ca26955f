"""A static page that runs a pretrained model in the visitor's browser, by onnxruntime-web."""

from bruno.page.files import serve_page, write_page

__all__ = ["serve_page", "write_page"]
