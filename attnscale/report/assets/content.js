"use strict";
// What both pages begin with: errors that show, and the content that was written into the page.

// Errors are shown in the page, and kept in its `data-errors`.
function fail(reason) {
  const root = document.documentElement, box = document.getElementById("failure");
  root.dataset.errors = `${root.dataset.errors ? root.dataset.errors + "\n" : ""}${reason}`;
  box.hidden = false;
  box.textContent = `This page has met an error: ${reason}`;
}
addEventListener("error", (event) => fail(event.message));
addEventListener("unhandledrejection", (event) => fail(event.reason && event.reason.message || event.reason));

const run = JSON.parse(document.getElementById("content").textContent);
