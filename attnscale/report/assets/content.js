"use strict";
// Shared by both pages: error display, and the data embedded in the page.

// Errors are shown in the page and stored in its `data-errors`.
function fail(reason) {
  const root = document.documentElement, box = document.getElementById("failure");
  root.dataset.errors = `${root.dataset.errors ? root.dataset.errors + "\n" : ""}${reason}`;
  box.hidden = false;
  box.textContent = `Error in this page: ${reason}`;
}
addEventListener("error", (event) => fail(event.message));
addEventListener("unhandledrejection", (event) => fail(event.reason && event.reason.message || event.reason));

const page = JSON.parse(document.getElementById("content").textContent);
